"""Cases that nobody chose: sizes, arguments and samples drawn by a seed, and what each is asked."""
