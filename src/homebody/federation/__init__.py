"""The processes of a real federation: the server, and the devices that people's histories stay on."""
