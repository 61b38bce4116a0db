"""Advice from measured traffic: step size, fleet by hour, and which way of decoding pays."""
