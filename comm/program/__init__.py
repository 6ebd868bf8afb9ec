"""What every command of the package has: its version, a parser for ranks, and names that are imported when they are used."""
