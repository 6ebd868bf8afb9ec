"""What a machine does in a second: its sheet (hardware), the work of an operation, and its cost."""
