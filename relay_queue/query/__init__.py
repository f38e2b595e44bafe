"""Every read of the tables. It takes no write lock, and the store imports nothing of it."""
