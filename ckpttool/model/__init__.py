"""What is meant: pure integers and names.  Nothing here touches a disk."""
