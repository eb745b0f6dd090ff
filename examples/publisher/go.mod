module datastreamer.example/publisher

go 1.21
