"""How a job notices that a rank has failed, and how it ends. The collectives know nothing of it."""
