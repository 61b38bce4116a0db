"""An OpenAI-compatible service on Ray Serve."""
