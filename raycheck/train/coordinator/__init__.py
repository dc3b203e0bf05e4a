"""The coordinator: one actor per driver and run that turns the ranks' reports into commits."""
