"""What a user writes: frozen pydantic models, TOML files, dotted overrides. No torch, no ray."""
