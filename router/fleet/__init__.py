"""The workers as a router knows them: links, members, bookings, the prefix index."""
