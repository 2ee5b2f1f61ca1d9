"""A first draft of a recipe of pictures and scans: inventory of a folder, proposal, questions to the hospital."""
