"""A step that is run without a machine: forecast drives it, meter and operations count."""
