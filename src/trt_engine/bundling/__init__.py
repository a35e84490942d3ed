"""Models of several components (B1-B6): one `model_meta.json`, one folder of engines, one report."""
