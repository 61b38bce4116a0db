"""From a model to a draft adapter that is measured and ready to be served, in one run."""
