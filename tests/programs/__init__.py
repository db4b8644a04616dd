"""Random programs as a user might write them, judged against eager: `draw` writes one, `judge` says if it is right."""
