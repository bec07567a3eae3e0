"""Operations of a decoder layer other than matrix products, in several implementations of one interface."""
