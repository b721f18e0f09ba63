package server

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

// manifest reads the first object of a file in deploy/kubernetes.
func manifest(t *testing.T, name string, into any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("../../../deploy/kubernetes", name))
	if err != nil {
		t.Fatal(err)
	}
	first, _, _ := bytes.Cut(data, []byte("\n---\n"))
	if err := yaml.Unmarshal(first, into); err != nil {
		t.Fatal(err)
	}
}

// TestDeployedConfig: the config in deploy/kubernetes is one, and a server that is told to stop serves on until Services have left it
// out, as Istio's agents do not try another one; and has time for what comes then.
func TestDeployedConfig(t *testing.T) {
	var config struct{ Data map[string]string }
	manifest(t, "config.yaml", &config)
	s, err := parseConfig([]byte(config.Data["server.yaml"]), "/etc/chancery/config/server.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var set struct {
		Spec struct {
			Template struct {
				Spec struct {
					TerminationGracePeriodSeconds int
				}
			}
		}
	}
	manifest(t, "server.yaml", &set)
	pod := set.Spec.Template.Spec
	grace, delay := time.Duration(pod.TerminationGracePeriodSeconds)*time.Second, s.connections.DrainDelay
	if delay < 5*time.Second {
		t.Errorf("connections.drainDelay is %s: Services send callers to a server for some seconds after it was told to stop", delay)
	}
	const rest = 30 * time.Second // calls under way, and giving up lease, store, logs and keys
	if grace < delay+rest {
		t.Errorf("a pod has %s to stop; the drain alone takes %s", grace, delay)
	}
}
