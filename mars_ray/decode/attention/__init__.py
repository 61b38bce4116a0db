"""Attention of one forward over paged keys and values, with an implementation per device."""
