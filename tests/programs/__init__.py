"""Random programs like a user's, compared with eager: `draw` generates one, `judge` decides whether it is right."""
