"""Attention of one forward over paged keys and values, in a form for each kind of device."""
