"""What is made of findings: which are causes, which follow from them, what they cost, and how they are put
together."""
