"""Read first: builds the rooms, joins them with channels, runs the loop, owns the order of shutdown."""
