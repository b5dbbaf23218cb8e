"""What lets other libraries use this one. Each part needs its library; none is imported before it is asked for."""
