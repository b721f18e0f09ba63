package kube

import "math/rand/v2"

// noise is what gzip cannot make smaller.
func noise(n int) []byte {
	data := make([]byte, n)
	rand.NewChaCha8([32]byte{1}).Read(data)
	return data
}
