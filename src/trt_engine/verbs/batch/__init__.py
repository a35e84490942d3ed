"""`batch`: an engine over files, folders, Parquet and WebDataset shards, through Ray Data."""
