"""What keeps a run from starting or slows it down, found before it starts and said in words."""
