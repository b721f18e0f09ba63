package keys_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/chancery-project/chancery/ca/keys"
)

// TestSecretThatKubernetesMounts: a server that is not root reads a Secret's file, root's and readable by the pod's group, and
// refuses it where others may read it too, or the group is one that it is not in. It runs itself as such a user.
func TestSecretThatKubernetesMounts(t *testing.T) {
	if path := os.Getenv("CHANCERY_TEST_SECRET"); path != "" {
		secret, err := keys.ReadSecret("sealing key", path)
		fmt.Printf("read %q, %v\n", secret, err)
		return
	}
	if os.Geteuid() != 0 {
		t.Skip("only root can give files and processes to others")
	}
	const user, podGroup, otherGroup = 65532, 2000, 2001
	dir, err := os.MkdirTemp("", "mounted-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		owner, group int
		mode         os.FileMode
		as           uint32
		ok           bool
	}{
		"as Kubernetes mounts it":           {0, podGroup, 0o440, user, true},
		"the user's own":                    {user, podGroup, 0o400, user, true},
		"the user's own, read by its group": {user, podGroup, 0o440, user, false},
		"another user's":                    {1234, podGroup, 0o440, user, false},
		"read by all":                       {0, podGroup, 0o444, user, false},
		"written by the group":              {0, podGroup, 0o460, user, false},
		"read by root's group":              {0, 0, 0o440, user, false},
		"read by another group":             {0, otherGroup, 0o440, user, false},
		"root reads what a group reads":     {0, podGroup, 0o440, 0, false},
		"root reads what only root reads":   {0, 0, 0o400, 0, true},
	} {
		path := filepath.Join(dir, "state.key")
		os.Remove(path)
		if err := os.WriteFile(path, []byte("key\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(path, tc.owner, tc.group); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, tc.mode); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$") // the child's own: where the file lies it may not look
		cmd.Env, cmd.Dir = []string{"CHANCERY_TEST_SECRET=" + path}, "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: tc.as, Gid: tc.as, Groups: []uint32{podGroup}}}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		read := strings.Contains(string(out), `read "key", <nil>`)
		if read != tc.ok || !read && !strings.Contains(string(out), "should be 0600") && !strings.Contains(string(out), "permission denied") {
			t.Errorf("%s: %s", name, out)
		}
	}
}
