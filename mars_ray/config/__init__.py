"""What users write: frozen pydantic models, TOML files, dotted overrides. No torch, no ray."""
