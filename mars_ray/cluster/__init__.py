"""Ray clusters: the environment of their nodes, and a cluster of several nodes on this machine."""
