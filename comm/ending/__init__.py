"""What rank, guard and launcher need to end a job and to say why. The standard library only: guard and launcher have no torch.

`processes.py` reads /proc, `words.py` says in words what it finds, `report.py` writes, `status_table.py` and `stacks.py` show
what the ranks of a node are doing. docs/architecture.md has the table of who ends a job when.
"""
