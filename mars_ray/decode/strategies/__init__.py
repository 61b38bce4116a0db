"""One file per decoding mode: plan a forward, absorb its rows."""
