"""The same requests under the old policies and the new one, in equal memory and in a time that is reckoned."""
