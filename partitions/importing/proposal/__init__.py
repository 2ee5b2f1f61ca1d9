"""A first draft of a recipe of pictures and scans: what a folder holds, what is proposed, what the hospital answers."""
