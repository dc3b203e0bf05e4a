"""How long a save blocks training: through raycheck, through a framework itself, and as Ray does it."""
