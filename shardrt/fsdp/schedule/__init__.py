"""What happens when: the hooks around modules, a root's iteration, the groups, what is gathered ahead, what is registered."""
