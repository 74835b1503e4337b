"""Images: which member of a group encodes which (`members.py`), or which rank of all, apart from packs (`world.py`)."""
