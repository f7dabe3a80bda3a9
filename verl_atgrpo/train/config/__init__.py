"""Reading a job's configuration, and refusing what cannot work before Ray starts."""
