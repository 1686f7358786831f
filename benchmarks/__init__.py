"""Times the ops on a GPU next to their peers and the device's limits: `bi-audit bench` from a checkout."""
