"""Text, markdown and HTML from records; reads records, never the code that made them."""
