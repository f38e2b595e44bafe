"""Every read of the tables. Nothing here takes the write lock, and the store imports nothing of it."""
