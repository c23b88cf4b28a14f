"""Session observation: which providers the sessions of the process asked for, and where their nodes run."""
