"""What goes on when ranks are lost: membership says which ranks there are, copies are kept in memory, moves sends files."""
