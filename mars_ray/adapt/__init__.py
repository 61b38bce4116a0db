"""Makes a draft adapter for a model, measured and ready to be served, in one run."""
