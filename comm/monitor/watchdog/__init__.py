"""The thread that looks at this rank's calls and hears of the others: who is late, lost, stopped, or waits in a circle."""
