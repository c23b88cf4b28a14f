"""Provider options: their table, how values are read, and what can change while a session lives."""
