"""What is communicated between split modules: axis is the group, relayout the changes of layout with their backward."""
