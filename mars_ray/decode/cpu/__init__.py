"""The decoding step of a model on a CPU, compiled: `step.cpp`, its library, and the backend."""
