"""Models of several components: one `model_meta.json`, one folder of engines, one report."""
