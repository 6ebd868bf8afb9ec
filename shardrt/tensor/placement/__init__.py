"""Which part of a tensor a rank has (placement), and how that changes (redistribute); nothing here knows DTensor."""
