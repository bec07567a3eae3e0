"""What a decoder layer does besides its matrix products, in several implementations behind one interface."""
