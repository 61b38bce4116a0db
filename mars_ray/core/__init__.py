"""The pure core: schedule, layout, mask, loss, acceptance, verification, frontier."""
