"""Our scaling policy beside those of other systems, in many cells, as shipped and tuned."""
