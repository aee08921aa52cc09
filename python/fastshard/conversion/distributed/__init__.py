"""One conversion by several processes or hosts."""
