"""Ray clusters: what their nodes have in common, and one of several nodes on this machine."""
